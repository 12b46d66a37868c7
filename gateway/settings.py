"""Django settings, read from the environment only. Refuses to start with a default secret outside debug."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from psycopg.conninfo import conninfo_to_dict

BASE_DIR = Path(__file__).resolve().parent.parent


def _flag(name: str, default: bool = False) -> bool:
    return os.environ.get(name, "1" if default else "0").lower() in {"1", "true", "yes", "on"}


def _origin(text: str) -> str:
    """As browsers write one: `scheme://host[:port]`, in lower case; or `*`, `null`, nothing."""
    origin = text.strip().rstrip("/").lower()
    if origin not in {"", "*", "null"} and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+", origin):
        raise ImproperlyConfigured(f"SLUICE_CORS_ORIGINS: {text.strip()!r} is no origin; write scheme://host[:port].")
    return origin


def _secret(name: str) -> str:
    """A secret of at least 32 characters; only debug may go without."""
    value = os.environ.get(name, "")
    if len(value) < 32:
        if DEBUG:
            return f"debug-only-{name.lower()}-not-for-production-use"
        raise ImproperlyConfigured(f"{name} must be set to at least 32 random characters (or set SLUICE_DEBUG=1).")
    return value


def _database(url: str) -> dict[str, Any]:
    """A Django database entry from a libpq URL (TCP or unix socket)."""
    parts = conninfo_to_dict(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.get("dbname", "sluice"),
        "USER": parts.get("user", ""),
        "PASSWORD": parts.get("password", ""),
        "HOST": parts.get("host", ""),
        "PORT": str(parts.get("port", "")),
        # 0: connections kept per thread leak under ASGI, where threads come and go.
        "CONN_MAX_AGE": 0,
        "OPTIONS": {"application_name": "sluice"},
    }


DEBUG = _flag("SLUICE_DEBUG")
SECRET_KEY = _secret("SLUICE_SECRET_KEY")
SLUICE_KEY_PEPPER = _secret("SLUICE_KEY_PEPPER").encode()
"""Server-side pepper of the HMAC under which API keys are stored."""

ALLOWED_HOSTS = [h for h in os.environ.get("SLUICE_ALLOWED_HOSTS", "127.0.0.1,localhost,[::1]").split(",") if h]
CSRF_TRUSTED_ORIGINS = [o for o in os.environ.get("SLUICE_TRUSTED_ORIGINS", "").split(",") if o]

DATABASES = {"default": _database(os.environ.get("DATABASE_URL", "postgresql:///sluice"))}
REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")
SLUICE_REDIS_PREFIX = os.environ.get("SLUICE_REDIS_PREFIX", "sluice:")
SLUICE_DATA_DIR = Path(os.environ.get("SLUICE_DATA_DIR", BASE_DIR / "var"))
SLUICE_GATEWAY_ID = os.environ.get("SLUICE_GATEWAY_ID", "")
"""Empty: each data-plane process draws its own at start."""
SLUICE_MAX_BODY_BYTES = int(os.environ.get("SLUICE_MAX_BODY_BYTES", 4 * 1024 * 1024))
SLUICE_CORS_ORIGINS = frozenset(filter(None, map(_origin, os.environ.get("SLUICE_CORS_ORIGINS", "*").split(","))))
"""Whose pages may call the data plane. `*`: all; a page can do there only what the key it was given allows."""
SLUICE_FIRST_BYTE_WAIT_S = float(os.environ.get("SLUICE_FIRST_BYTE_WAIT_S", "10"))
"""Response headers wait this long for the first token, so that errors keep their real status."""

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "channels",
    "django_htmx",
    "tenants",
    "tenants.billing",
    "gateway.metering",
    "gateway.manage",
    "frontend",
]
AUTH_USER_MODEL = "tenants.User"
MIGRATION_MODULES = {label: f"migrations.{label}" for label in ("tenants", "billing", "metering")}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

MIDDLEWARE = [
    "frontend.headers.ConsoleHeaders",
    "django.middleware.security.SecurityMiddleware",
    "frontend.assets.StaticFiles",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]
"""Of the console and management plane. The data plane runs without sessions, cookies or templates (gateway/asgi.py)."""

ROOT_URLCONF = "gateway.urls"
ASGI_APPLICATION = "gateway.asgi.console"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
STATIC_URL = "/static/"
STATIC_ROOT = SLUICE_DATA_DIR / "static"
WHITENOISE_USE_FINDERS = True
LOGIN_URL = "/login/"
LOGIN_REDIRECT_URL = "/"

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en-us"

# The console speaks plain HTTP on loopback by default; behind TLS the installer sets SLUICE_HTTPS=1.
_HTTPS = _flag("SLUICE_HTTPS")
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _HTTPS
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
SECURE_SSL_REDIRECT = _HTTPS
SECURE_HSTS_SECONDS = 31_536_000 if _HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = _HTTPS
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if _flag("SLUICE_BEHIND_PROXY") else None
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"

CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.core.RedisChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL], "prefix": f"{SLUICE_REDIS_PREFIX}channels"},
    }
}

REST_FRAMEWORK = {
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_AUTHENTICATION_CLASSES": ["rest_framework.authentication.SessionAuthentication"],
    "DEFAULT_PARSER_CLASSES": ["gateway.manage.parsers.BoundedJSONParser"],
    "COERCE_DECIMAL_TO_STRING": True,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Sluice management API",
    "VERSION": "1",
    "ENUM_NAME_OVERRIDES": {
        "TenantStatus": "tenants.models.Tenant.Status",
        "ProjectStatus": "tenants.models.Project.Status",
    },
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "filters": {"redact": {"()": "gateway.observability.redaction.Redact"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["redact"]}},
    "root": {"handlers": ["stderr"], "level": os.environ.get("SLUICE_LOG_LEVEL", "INFO")},
    # A task that runs every few seconds and says so three times would hide what matters; failures are warnings.
    "loggers": {name: {"level": "WARNING"} for name in ("celery.beat", "celery.worker.strategy", "celery.app.trace")},
}
