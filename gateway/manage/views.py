"""The management API: tenants, projects, keys, tiers, prices, usage, audit. Changes go through service verbs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

from django.db.models import QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import exceptions, status
from rest_framework.decorators import action
from rest_framework.generics import get_object_or_404
from rest_framework.mixins import ListModelMixin, RetrieveModelMixin
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from gateway.manage import serializers as s
from gateway.manage.access import Managed, OperatorWrites
from tenants import selectors, services
from tenants.billing import services as billing
from tenants.billing.models import Price, PriceVersion
from tenants.billing.selectors import balance, usage_page
from tenants.models import ApiKey, Project, Tenant, Tier

__all__ = ["AuditView", "KeyViews", "PriceViews", "ProjectViews", "TenantViews", "TierViews", "UsageView"]

T = TypeVar("T")
PAGE, PAGE_MAX = 50, 500
_SIZE = OpenApiParameter("size", int, description=f"Rows a page, 1 to {PAGE_MAX}.")


class TierViews(ListModelMixin, RetrieveModelMixin, Managed, GenericViewSet[Tier]):
    """Service classes. Operators change them; new targets count for requests admitted from then on."""

    queryset = Tier.objects.order_by("rank")
    serializer_class = s.TierSerializer
    permission_classes = [OperatorWrites]
    lookup_field = "name"
    pagination_class = None

    def create(self, request: Request) -> Response:
        data = _valid(self.get_serializer(data=request.data))
        tier = services.create_tier(self.actor, **data)
        return Response(self.get_serializer(tier).data, status.HTTP_201_CREATED)

    def partial_update(self, request: Request, name: str) -> Response:
        tier = self.get_object()
        data = _valid(self.get_serializer(tier, data=request.data, partial=True))
        _fixed(data, tier, "name", "rank")
        return Response(self.get_serializer(services.update_tier(self.actor, tier, **data)).data)


class TenantViews(ListModelMixin, RetrieveModelMixin, Managed, GenericViewSet[Tenant]):
    """Tenants that the user may look at. Operators create and change them."""

    serializer_class = s.TenantSerializer
    permission_classes = [OperatorWrites]
    lookup_field = "slug"
    pagination_class = None

    def get_queryset(self) -> QuerySet[Tenant]:
        if getattr(self, "swagger_fake_view", False):
            return Tenant.objects.none()
        return selectors.tenants_for(self.user).prefetch_related("lower_tiers").order_by("slug")

    def create(self, request: Request) -> Response:
        data = _valid(self.get_serializer(data=request.data))
        tenant = services.create_tenant(self.actor, lower=data.pop("lower_tiers", ()), **data)
        return Response(self.get_serializer(tenant).data, status.HTTP_201_CREATED)

    def partial_update(self, request: Request, slug: str) -> Response:
        tenant = self.get_object()
        data = _valid(self.get_serializer(tenant, data=request.data, partial=True))
        _fixed(data, tenant, "slug")
        tenant = services.update_tenant(self.actor, tenant, data.pop("lower_tiers", None), **data)
        return Response(self.get_serializer(tenant).data)

    @extend_schema(request=s.StatusSerializer, responses=s.TenantSerializer)
    @action(detail=True, methods=["put"])
    def status(self, request: Request, slug: str) -> Response:
        data = _valid(s.StatusSerializer(data=request.data))
        tenant = services.set_status(self.actor, self.get_object(), Tenant.Status(data["status"]))
        return Response(self.get_serializer(tenant).data)

    @extend_schema(responses=s.BalanceSerializer)
    @action(detail=True)
    def balance(self, request: Request, slug: str) -> Response:
        tenant = self.tenant(slug, selectors.SEES_MONEY)
        amount, _ = balance(slug, tenant.currency)
        return Response(s.BalanceSerializer({"amount": amount, "currency": tenant.currency}).data)

    @extend_schema(request=s.TopUpSerializer, responses={201: s.BalanceSerializer})
    @action(detail=True, methods=["post"], url_path="top-ups")
    def top_up(self, request: Request, slug: str) -> Response:
        tenant = self.get_object()
        billing.top_up(self.actor, tenant, **_valid(s.TopUpSerializer(data=request.data)))
        amount, _ = balance(slug, tenant.currency)
        facts = {"amount": amount, "currency": tenant.currency}
        return Response(s.BalanceSerializer(facts).data, status.HTTP_201_CREATED)


class ProjectViews(ListModelMixin, Managed, GenericViewSet[Project]):
    """Projects of the user's tenants; owners and admins of a tenant create them."""

    serializer_class = s.ProjectSerializer
    permission_classes = [IsAuthenticated]
    pagination_class = None

    def get_queryset(self) -> QuerySet[Project]:
        if getattr(self, "swagger_fake_view", False):
            return Project.objects.none()
        return selectors.projects(self.user).order_by("tenant__slug", "slug")

    def create(self, request: Request) -> Response:
        data = _valid(self.get_serializer(data=request.data))
        tenant = self.tenant(data["tenant"]["slug"], selectors.MANAGES)
        project = services.create_project(self.actor, tenant, data["slug"], data["name"])
        return Response(self.get_serializer(project).data, status.HTTP_201_CREATED)


class KeyViews(ListModelMixin, RetrieveModelMixin, Managed, GenericViewSet[ApiKey]):
    """API keys of the user's tenants. Deleting one revokes it; the row stays."""

    serializer_class = s.ApiKeySerializer
    permission_classes = [IsAuthenticated]
    lookup_field = "public_id"
    pagination_class = None

    def get_queryset(self) -> QuerySet[ApiKey]:
        if getattr(self, "swagger_fake_view", False):
            return ApiKey.objects.none()
        return selectors.api_keys(self.user).select_related("rotated_from").order_by("-id")

    @extend_schema(request=s.IssueKeySerializer, responses={201: s.IssuedKeySerializer})
    def create(self, request: Request) -> Response:
        data = _valid(s.IssueKeySerializer(data=request.data))
        tenant = self.tenant(data.pop("tenant"), selectors.MANAGES)
        project = get_object_or_404(Project.objects.filter(tenant=tenant), slug=data.pop("project"))
        issued = services.issue_key(self.actor, project, **data)
        return Response(s.IssuedKeySerializer(issued).data, status.HTTP_201_CREATED)

    @extend_schema(request=s.RotateKeySerializer, responses={201: s.IssuedKeySerializer})
    @action(detail=True, methods=["post"])
    def rotate(self, request: Request, public_id: str) -> Response:
        overlap_s = _valid(s.RotateKeySerializer(data=request.data))["overlap_s"]
        issued = services.rotate_key(self.actor, self._managed(), timedelta(seconds=overlap_s))
        return Response(s.IssuedKeySerializer(issued).data, status.HTTP_201_CREATED)

    def destroy(self, request: Request, public_id: str) -> Response:
        services.revoke_key(self.actor, self._managed())
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _managed(self) -> ApiKey:
        """The key, if the user manages its tenant; 404 otherwise."""
        key = self.get_object()
        self.tenant(key.project.tenant.slug, selectors.MANAGES)
        return key


class PriceViews(ListModelMixin, RetrieveModelMixin, Managed, GenericViewSet[Price]):
    """The price book. Operators add classes and publish versions, which then stand."""

    queryset = Price.objects.order_by("price_class")
    serializer_class = s.PriceSerializer
    permission_classes = [OperatorWrites]
    lookup_field = "price_class"
    lookup_value_regex = ".+?(?<!/versions)"  # classes are often named like models, with a slash
    pagination_class = None

    def create(self, request: Request) -> Response:
        price = billing.create_price(self.actor, **_valid(self.get_serializer(data=request.data)))
        return Response(self.get_serializer(price).data, status.HTTP_201_CREATED)

    @extend_schema(methods=["GET"], responses=s.PriceVersionSerializer(many=True))
    @extend_schema(methods=["POST"], request=s.PriceVersionSerializer, responses={201: s.PriceVersionSerializer})
    @action(detail=True, methods=["get", "post"])
    def versions(self, request: Request, price_class: str) -> Response:
        price = self.get_object()
        if request.method == "POST":
            version = billing.publish(self.actor, price, **_valid(s.PriceVersionSerializer(data=request.data)))
            return Response(s.PriceVersionSerializer(version).data, status.HTTP_201_CREATED)
        rows = PriceVersion.objects.select_related("price").filter(price=price).order_by("-valid_from")
        return Response(s.PriceVersionSerializer(rows, many=True).data)


class UsageView(Managed):
    """Usage records, newest first. The next page begins before the `next` of this one."""

    permission_classes = [IsAuthenticated]

    @extend_schema(
        operation_id="usage_list",
        parameters=[
            OpenApiParameter("tenant", str, description="Slug; all of the user's tenants without it."),
            OpenApiParameter("before", OpenApiTypes.UUID, description="`next` of the page before."),
            _SIZE,
        ],
        responses={200: {"type": "object", "properties": {"results": {"type": "array"}, "next": {"type": "string"}}}},
    )
    def get(self, request: Request) -> Response:
        query = request.query_params
        slugs = selectors.visible_slugs(self.user)
        if "tenant" in query:
            slugs = frozenset({self.tenant(query["tenant"], selectors.SEES).slug})
        size = _size(query)
        before = _parsed(query, "before", UUID)
        rows = list(usage_page(slugs, before, size))
        money_of = set(selectors.tenants_for(self.user, selectors.SEES_MONEY).values_list("slug", flat=True))
        results = s.UsageSerializer(rows, many=True, context={"money_of": money_of}).data
        return Response({"results": results, "next": rows[-1].request_id.hex if len(rows) == size else None})


class AuditView(Managed):
    """The audit trail, newest first, of the tenants the user manages; operators see all of it."""

    permission_classes = [IsAuthenticated]

    @extend_schema(
        operation_id="audit_list",
        parameters=[OpenApiParameter("before", int, description="`next` of the page before."), _SIZE],
        responses={200: {"type": "object", "properties": {"results": {"type": "array"}, "next": {"type": "integer"}}}},
    )
    def get(self, request: Request) -> Response:
        events = selectors.audit_events(self.user)
        before = _parsed(request.query_params, "before", int)
        if before is not None:
            events = events.filter(position__lt=before)
        size = _size(request.query_params)
        rows = list(events.order_by("-position")[:size])
        results = s.AuditEventSerializer(rows, many=True).data
        return Response({"results": results, "next": rows[-1].position if len(rows) == size else None})


def _valid(serializer: Any) -> dict[str, Any]:
    serializer.is_valid(raise_exception=True)
    data: dict[str, Any] = serializer.validated_data
    return data


def _fixed(data: dict[str, Any], row: Any, *names: str) -> None:
    """Fields that a row keeps for ever may be sent back, not changed."""
    for name in names:
        if data.pop(name, getattr(row, name)) != getattr(row, name):
            raise exceptions.ValidationError({name: ["It can't be changed."]})


def _parsed(query: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    """A query parameter, None when it isn't there."""
    if name not in query:
        return None
    try:
        return parse(query[name])
    except ValueError:
        raise exceptions.ValidationError({name: ["It can't be read."]}) from None


def _size(query: Mapping[str, str]) -> int:
    size = _parsed(query, "size", int)
    if size is None:
        return PAGE
    if not 1 <= size <= PAGE_MAX:
        raise exceptions.ValidationError({"size": [f"1 to {PAGE_MAX}."]})
    return size
