"""What the management API shows and takes. Money is a decimal string (I5); a secret appears in one answer only (T3)."""

from __future__ import annotations

import ipaddress
from typing import Any

from rest_framework import serializers

from tenants.billing.models import Price, PriceVersion, UsageRecord
from tenants.models import ApiKey, AuditEvent, Project, Tenant, Tier
from tenants.partitions import uuid_time
from tenants.services import SCOPES

__all__ = [
    "ApiKeySerializer",
    "AuditEventSerializer",
    "BalanceSerializer",
    "IssueKeySerializer",
    "IssuedKeySerializer",
    "PriceSerializer",
    "PriceVersionSerializer",
    "ProjectSerializer",
    "RotateKeySerializer",
    "StatusSerializer",
    "TenantSerializer",
    "TierSerializer",
    "TopUpSerializer",
    "UsageSerializer",
]


class TierSerializer(serializers.ModelSerializer[Tier]):
    class Meta:
        model = Tier
        fields = ["name", "rank", "ttft_ms", "tpot_ms", "max_queued", "weight", "sheddable", "floor_share"]


class TenantSerializer(serializers.ModelSerializer[Tenant]):
    """`slug` is chosen once; the status has an address of its own."""

    tier: Any = serializers.SlugRelatedField(slug_field="name", queryset=Tier.objects.all())
    lower_tiers: Any = serializers.SlugRelatedField(
        slug_field="name", queryset=Tier.objects.all(), many=True, required=False
    )

    class Meta:
        model = Tenant
        fields = [
            "slug",
            "name",
            "status",
            "tier",
            "lower_tiers",
            "weight",
            "max_concurrent",
            "max_queued",
            "rate_limits",
            "billing",
            "floor",
            "currency",
            "created_at",
        ]
        read_only_fields = ["status", "created_at"]


class StatusSerializer(serializers.Serializer[Any]):
    status = serializers.ChoiceField(choices=Tenant.Status.choices)


class ProjectSerializer(serializers.ModelSerializer[Project]):
    tenant: Any = serializers.SlugField(source="tenant.slug")

    class Meta:
        model = Project
        fields = ["tenant", "slug", "name", "status", "created_at"]
        read_only_fields = ["status", "created_at"]
        validators: list[Any] = []  # uniqueness is told by the service, after the tenant check


class ApiKeySerializer(serializers.ModelSerializer[ApiKey]):
    """A key as it may be shown: never its digest."""

    tenant = serializers.CharField(source="project.tenant.slug", read_only=True)
    project = serializers.CharField(source="project.slug", read_only=True)
    models = serializers.JSONField(source="allowed_models", read_only=True)
    rotated_from = serializers.CharField(source="rotated_from.public_id", read_only=True, default=None)

    class Meta:
        model = ApiKey
        fields = [
            "public_id",
            "prefix",
            "name",
            "tenant",
            "project",
            "scopes",
            "models",
            "ip_ranges",
            "expires_at",
            "revoked_at",
            "last_used_at",
            "rotated_from",
            "created_at",
        ]


class IssueKeySerializer(serializers.Serializer[Any]):
    tenant = serializers.SlugField()
    project = serializers.SlugField(default="default")
    name = serializers.CharField(max_length=200)
    scopes = serializers.ListField(child=serializers.ChoiceField(choices=SCOPES), default=list(SCOPES), min_length=1)
    models = serializers.ListField(child=serializers.CharField(max_length=200), allow_null=True, default=None)
    ip_ranges = serializers.ListField(child=serializers.CharField(max_length=64), default=list)
    expires_at = serializers.DateTimeField(allow_null=True, default=None)

    def validate_ip_ranges(self, ranges: list[str]) -> list[str]:
        try:
            return [str(ipaddress.ip_network(x)) for x in ranges]
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from None


class IssuedKeySerializer(serializers.Serializer[Any]):
    """`secret_key` is the full text of the key; it can't be read again."""

    key = ApiKeySerializer()
    secret_key = serializers.CharField(source="text")


class RotateKeySerializer(serializers.Serializer[Any]):
    overlap_s = serializers.IntegerField(min_value=0, max_value=90 * 86_400, default=86_400)


class PriceSerializer(serializers.ModelSerializer[Price]):
    class Meta:
        model = Price
        fields = ["price_class", "currency"]


class PriceVersionSerializer(serializers.ModelSerializer[PriceVersion]):
    """Rates in nano-units of the currency per million tokens."""

    price_class = serializers.CharField(source="price.price_class", read_only=True)

    class Meta:
        model = PriceVersion
        fields = [
            "price_class",
            "number",
            "input_nano_per_mtok",
            "cached_nano_per_mtok",
            "output_nano_per_mtok",
            "valid_from",
            "valid_to",
            "published_at",
        ]
        read_only_fields = ["number", "valid_to", "published_at"]
        extra_kwargs = {"valid_from": {"required": False}}


class BalanceSerializer(serializers.Serializer[Any]):
    amount = serializers.DecimalField(max_digits=38, decimal_places=15)
    currency = serializers.CharField()


class TopUpSerializer(serializers.Serializer[Any]):
    amount = serializers.DecimalField(max_digits=20, decimal_places=9)
    note = serializers.CharField(max_length=500)


class UsageSerializer(serializers.ModelSerializer[UsageRecord]):
    """`money` is null for those who may not see it."""

    request = serializers.CharField(source="request_id.hex", read_only=True)
    admitted_at = serializers.SerializerMethodField()
    money = serializers.SerializerMethodField()

    class Meta:
        model = UsageRecord
        fields = [
            "request",
            "tenant",
            "tier",
            "pool",
            "reason",
            "code",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
            "wasted_tokens",
            "engine_s",
            "joules",
            "admitted_at",
            "finished_at",
            "currency",
            "money",
        ]

    def get_admitted_at(self, row: UsageRecord) -> str:
        return uuid_time(row.request_id).isoformat()

    def get_money(self, row: UsageRecord) -> str | None:
        return f"{row.money:f}" if row.tenant in self.context.get("money_of", ()) else None


class AuditEventSerializer(serializers.ModelSerializer[AuditEvent]):
    class Meta:
        model = AuditEvent
        fields = ["position", "at", "actor_label", "tenant", "action", "target", "before", "after"]
