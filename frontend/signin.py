"""Signing in and out with Django's own sessions; attempts are throttled and errors tell no more than they must."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView, LogoutView
from django.http import HttpRequest, HttpResponse

from frontend.attempts import Throttle

__all__ = ["SignIn", "SignOut"]


class SignInForm(AuthenticationForm):
    """One message for a wrong name, a wrong password and a disabled account."""

    error_messages = {
        "invalid_login": "That user name and password don't match an account.",
        "inactive": "That user name and password don't match an account.",
    }


class SignIn(LoginView):
    """The sign-in page. Too many failures are a 429 with the time to wait; the password is then not even checked."""

    template_name = "console/sign_in.html"
    authentication_form = SignInForm
    redirect_authenticated_user = True

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        throttle = Throttle(request.META.get("REMOTE_ADDR", ""), request.POST.get("username", ""))
        wait_s = throttle.blocked_for_s()
        if wait_s:
            minutes = -(-wait_s // 60)
            context = {"wait": f"{minutes} minute{'' if minutes == 1 else 's'}", "form": self.form_class_unbound()}
            response = self.render_to_response(self.get_context_data(**context), status=429)
            response.headers["Retry-After"] = str(wait_s)
            return response
        response = super().post(request, *args, **kwargs)
        if response.status_code == 302:
            throttle.forget()
        return response

    def form_class_unbound(self) -> AuthenticationForm:
        """An empty form that keeps the typed name but shows no field errors."""
        return SignInForm(self.request, initial={"username": self.request.POST.get("username", "")[:150]})


class SignOut(LogoutView):
    """By POST only, so that a link on another site can't sign anybody out."""

    next_page = "console:sign_in"
