import django.contrib.auth.models
import django.contrib.auth.validators
import django.core.validators
import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

import tenants.models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("auth", "0012_alter_user_first_name_max_length"),
    ]

    operations = [
        migrations.CreateModel(
            name="Tenant",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "slug",
                    models.CharField(
                        max_length=48,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "^[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?$",
                                "Lower-case letters, digits and inner hyphens.",
                            )
                        ],
                    ),
                ),
                ("name", models.CharField(max_length=200)),
                (
                    "status",
                    models.CharField(
                        choices=[("active", "Active"), ("suspended", "Suspended"), ("closed", "Closed")],
                        default="active",
                        max_length=16,
                    ),
                ),
                (
                    "weight",
                    models.FloatField(default=1.0, validators=[django.core.validators.MinValueValidator(0.001)]),
                ),
                (
                    "max_concurrent",
                    models.IntegerField(
                        default=-1,
                        help_text="-1: unlimited.",
                        validators=[django.core.validators.MinValueValidator(-1)],
                    ),
                ),
                (
                    "max_queued",
                    models.IntegerField(
                        default=-1,
                        help_text="-1: unlimited.",
                        validators=[django.core.validators.MinValueValidator(-1)],
                    ),
                ),
                (
                    "rate_limits",
                    models.JSONField(blank=True, default=list, help_text='[{"name", "capacity", "per_minute"}]'),
                ),
                (
                    "billing",
                    models.CharField(
                        choices=[("prepaid", "Prepaid"), ("postpaid", "Postpaid")], default="postpaid", max_length=16
                    ),
                ),
                (
                    "floor",
                    models.DecimalField(
                        blank=True,
                        decimal_places=9,
                        help_text="Prepaid balance may not fall below; <= 0.",
                        max_digits=20,
                        null=True,
                    ),
                ),
                (
                    "currency",
                    models.CharField(
                        default="USD", max_length=3, validators=[django.core.validators.RegexValidator("^[A-Z]{3}$")]
                    ),
                ),
                ("generation", models.PositiveBigIntegerField(default=1, editable=False)),
                (
                    "salt",
                    models.CharField(
                        default=tenants.models._salt,
                        editable=False,
                        help_text="Keeps its prefix cache apart.",
                        max_length=32,
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
            ],
            options={
                "ordering": ["slug"],
            },
        ),
        migrations.CreateModel(
            name="User",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("password", models.CharField(max_length=128, verbose_name="password")),
                ("last_login", models.DateTimeField(blank=True, null=True, verbose_name="last login")),
                (
                    "is_superuser",
                    models.BooleanField(
                        default=False,
                        help_text="Designates that this user has all permissions without explicitly assigning them.",
                        verbose_name="superuser status",
                    ),
                ),
                (
                    "username",
                    models.CharField(
                        error_messages={"unique": "A user with that username already exists."},
                        help_text="Required. 150 characters or fewer. Letters, digits and @/./+/-/_ only.",
                        max_length=150,
                        unique=True,
                        validators=[django.contrib.auth.validators.UnicodeUsernameValidator()],
                        verbose_name="username",
                    ),
                ),
                ("first_name", models.CharField(blank=True, max_length=150, verbose_name="first name")),
                ("last_name", models.CharField(blank=True, max_length=150, verbose_name="last name")),
                ("email", models.EmailField(blank=True, max_length=254, verbose_name="email address")),
                (
                    "is_staff",
                    models.BooleanField(
                        default=False,
                        help_text="Designates whether the user can log into this admin site.",
                        verbose_name="staff status",
                    ),
                ),
                (
                    "is_active",
                    models.BooleanField(
                        default=True,
                        help_text="Designates whether this user should be treated as active. Unselect this instead of deleting accounts.",
                        verbose_name="active",
                    ),
                ),
                ("date_joined", models.DateTimeField(default=django.utils.timezone.now, verbose_name="date joined")),
                (
                    "groups",
                    models.ManyToManyField(
                        blank=True,
                        help_text="The groups this user belongs to. A user will get all permissions granted to each of their groups.",
                        related_name="user_set",
                        related_query_name="user",
                        to="auth.group",
                        verbose_name="groups",
                    ),
                ),
                (
                    "user_permissions",
                    models.ManyToManyField(
                        blank=True,
                        help_text="Specific permissions for this user.",
                        related_name="user_set",
                        related_query_name="user",
                        to="auth.permission",
                        verbose_name="user permissions",
                    ),
                ),
            ],
            options={
                "verbose_name": "user",
                "verbose_name_plural": "users",
                "abstract": False,
            },
            managers=[
                ("objects", django.contrib.auth.models.UserManager()),
            ],
        ),
        migrations.CreateModel(
            name="AuditEvent",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "position",
                    models.PositiveBigIntegerField(help_text="Without gaps: a missing one is tampering.", unique=True),
                ),
                ("at", models.DateTimeField()),
                ("actor_label", models.CharField(max_length=200)),
                (
                    "tenant",
                    models.CharField(
                        blank=True, db_index=True, help_text="Slug; empty: the installation.", max_length=48
                    ),
                ),
                ("action", models.CharField(max_length=64)),
                ("target", models.CharField(max_length=200)),
                ("before", models.JSONField(null=True)),
                ("after", models.JSONField(null=True)),
                ("previous", models.BinaryField(max_length=32)),
                ("hash", models.BinaryField(max_length=32)),
                (
                    "actor",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["-position"],
            },
        ),
        migrations.CreateModel(
            name="Project",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "slug",
                    models.CharField(
                        max_length=48,
                        validators=[
                            django.core.validators.RegexValidator(
                                "^[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?$",
                                "Lower-case letters, digits and inner hyphens.",
                            )
                        ],
                    ),
                ),
                ("name", models.CharField(max_length=200)),
                (
                    "status",
                    models.CharField(
                        choices=[("active", "Active"), ("closed", "Closed")], default="active", max_length=16
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="projects", to="tenants.tenant"
                    ),
                ),
            ],
            options={
                "ordering": ["tenant", "slug"],
            },
        ),
        migrations.CreateModel(
            name="Membership",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "role",
                    models.CharField(
                        choices=[("owner", "Owner"), ("admin", "Admin"), ("finance", "Finance"), ("viewer", "Viewer")],
                        default="viewer",
                        max_length=16,
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="memberships",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="memberships", to="tenants.tenant"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Tier",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "name",
                    models.CharField(
                        max_length=48,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "^[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?$",
                                "Lower-case letters, digits and inner hyphens.",
                            )
                        ],
                    ),
                ),
                ("rank", models.PositiveSmallIntegerField(help_text="0 is served first.", unique=True)),
                ("ttft_ms", models.PositiveIntegerField(help_text="Target of the time to first token.")),
                (
                    "tpot_ms",
                    models.PositiveIntegerField(help_text="Target of the mean time per output token after the first."),
                ),
                (
                    "max_queued",
                    models.PositiveIntegerField(
                        default=256, help_text="Requests of the tier that may wait in one pool."
                    ),
                ),
                (
                    "weight",
                    models.FloatField(default=1.0, validators=[django.core.validators.MinValueValidator(0.001)]),
                ),
                ("sheddable", models.BooleanField(default=False, help_text="Refused early under overload.")),
                (
                    "floor_share",
                    models.DecimalField(
                        decimal_places=3, default=0, help_text="Guaranteed share, 0 to 1.", max_digits=4
                    ),
                ),
            ],
            options={
                "ordering": ["rank"],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("floor_share__gte", 0), ("floor_share__lte", 1)), name="tier_floor_share"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("tpot_ms__gt", 0), ("ttft_ms__gt", 0), ("weight__gt", 0)),
                        name="tier_positive",
                    ),
                ],
            },
        ),
        migrations.AddField(
            model_name="tenant",
            name="lower_tiers",
            field=models.ManyToManyField(
                blank=True, help_text="Worse tiers it may ask for.", related_name="+", to="tenants.tier"
            ),
        ),
        migrations.AddField(
            model_name="tenant",
            name="tier",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT, related_name="tenants", to="tenants.tier"
            ),
        ),
        migrations.CreateModel(
            name="TierTarget",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("since", models.DateTimeField()),
                ("ttft_ms", models.PositiveIntegerField()),
                ("tpot_ms", models.PositiveIntegerField()),
                (
                    "tier",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="targets", to="tenants.tier"
                    ),
                ),
            ],
            options={
                "ordering": ["tier", "since"],
            },
        ),
        migrations.CreateModel(
            name="ApiKey",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("public_id", models.CharField(max_length=16, unique=True)),
                ("digest", models.BinaryField(max_length=32)),
                ("prefix", models.CharField(max_length=16)),
                ("name", models.CharField(max_length=200)),
                (
                    "scopes",
                    models.JSONField(default=list, help_text="What it may call, for example inference or usage."),
                ),
                ("allowed_models", models.JSONField(blank=True, help_text="Names of models; null: all.", null=True)),
                ("ip_ranges", models.JSONField(blank=True, default=list, help_text="CIDR ranges; empty: any address.")),
                ("expires_at", models.DateTimeField(blank=True, null=True)),
                ("revoked_at", models.DateTimeField(blank=True, null=True)),
                ("last_used_at", models.DateTimeField(blank=True, null=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "created_by",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "rotated_from",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="keys", to="tenants.project"
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("rotated_from", models.F("id")), _negated=True),
                        name="key_not_rotated_from_itself",
                    )
                ],
            },
        ),
        migrations.AddConstraint(
            model_name="project",
            constraint=models.UniqueConstraint(fields=("tenant", "slug"), name="project_slug"),
        ),
        migrations.AddConstraint(
            model_name="membership",
            constraint=models.UniqueConstraint(fields=("user", "tenant"), name="membership_once"),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(condition=models.Q(("weight__gt", 0)), name="tenant_weight"),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(
                condition=models.Q(("max_concurrent__gte", -1), ("max_queued__gte", -1)), name="tenant_limits"
            ),
        ),
        migrations.AddConstraint(
            model_name="tenant",
            constraint=models.CheckConstraint(
                condition=models.Q(("floor__isnull", True), ("floor__lte", 0), _connector="OR"), name="tenant_floor"
            ),
        ),
        migrations.AddConstraint(
            model_name="tiertarget",
            constraint=models.UniqueConstraint(fields=("tier", "since"), name="tier_target_since"),
        ),
    ]
