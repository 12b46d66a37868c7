"""Who may do what through the management API: operators everything, members what their role with the tenant allows."""

from __future__ import annotations

from typing import Any, cast

from django.core.exceptions import ValidationError as Invalid
from django.db import IntegrityError
from rest_framework import exceptions
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from tenants import selectors
from tenants.audit import Actor
from tenants.errors import Refused
from tenants.models import Tenant, User

__all__ = ["Managed", "OperatorWrites"]


class OperatorWrites(BasePermission):
    """Everyone who is signed in reads; operators change."""

    def has_permission(self, request: Request, view: Any) -> bool:
        user = request.user
        return bool(user.is_authenticated and (request.method in SAFE_METHODS or user.is_staff))


class Conflict(exceptions.APIException):
    status_code = 409
    default_detail = "It contradicts what is there already."
    default_code = "conflict"


class Managed(APIView):
    """Base of all views: the acting user, tenant checks, and the record's refusals as 400 and 409."""

    @property
    def user(self) -> User:
        return cast(User, self.request.user)

    @property
    def actor(self) -> Actor:
        return Actor.of(self.user)

    def tenant(self, slug: str, roles: frozenset[str]) -> Tenant:
        """The tenant; 404 where the user has none of the roles, so that names can't be guessed."""
        found = selectors.tenants_for(self.user, roles).filter(slug=slug).first()
        if found is None:
            raise exceptions.NotFound
        return found

    def handle_exception(self, exc: Exception) -> Response:
        if isinstance(exc, Invalid):
            detail: Any = exc.message_dict if hasattr(exc, "error_dict") else exc.messages
            exc = exceptions.ValidationError(detail)
        elif isinstance(exc, Refused):
            exc = exceptions.ValidationError([str(exc)])
        elif isinstance(exc, IntegrityError):
            exc = Conflict()
        return super().handle_exception(exc)
