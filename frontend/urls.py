"""Addresses of the console."""

from __future__ import annotations

from django.urls import path

from frontend import views
from frontend.signin import SignIn, SignOut

app_name = "console"
urlpatterns = [
    path("", views.live, name="live"),
    path("live/stream", views.stream, name="stream"),
    path("requests/", views.requests, name="requests"),
    path("login/", SignIn.as_view(), name="sign_in"),
    path("logout/", SignOut.as_view(), name="sign_out"),
]
