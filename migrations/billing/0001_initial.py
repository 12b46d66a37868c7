import django.core.validators
import django.db.models.deletion
from django.db import migrations, models

from tenants.partitions import CREATE_FLOOR, DROP_FLOOR, CreatePartitionedModel


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("tenants", "0002_guards"),
    ]

    operations = [
        migrations.RunSQL(CREATE_FLOOR, DROP_FLOOR),
        migrations.CreateModel(
            name="LedgerAccount",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("tenant", "Tenant"),
                            ("revenue_input", "Input"),
                            ("revenue_cached", "Cached"),
                            ("revenue_output", "Output"),
                            ("cash", "Cash"),
                            ("rounding", "Rounding"),
                        ],
                        max_length=32,
                    ),
                ),
                (
                    "currency",
                    models.CharField(max_length=3, validators=[django.core.validators.RegexValidator("^[A-Z]{3}$")]),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="accounts",
                        to="tenants.tenant",
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Price",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("price_class", models.CharField(max_length=128, unique=True)),
                (
                    "currency",
                    models.CharField(
                        default="USD", max_length=3, validators=[django.core.validators.RegexValidator("^[A-Z]{3}$")]
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="ServedModel",
            fields=[
                ("pool", models.CharField(max_length=200, primary_key=True, serialize=False)),
                ("price_class", models.CharField(max_length=128)),
                ("seen_at", models.DateTimeField()),
            ],
        ),
        migrations.CreateModel(
            name="Settlement",
            fields=[
                ("request_id", models.UUIDField(primary_key=True, serialize=False)),
                ("settled_at", models.DateTimeField()),
            ],
        ),
        migrations.CreateModel(
            name="Balance",
            fields=[
                (
                    "account",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.PROTECT,
                        primary_key=True,
                        related_name="balance",
                        serialize=False,
                        to="billing.ledgeraccount",
                    ),
                ),
                ("amount", models.DecimalField(decimal_places=15, default=0, max_digits=38)),
                ("sequence", models.BigIntegerField(default=0)),
            ],
        ),
        migrations.CreateModel(
            name="LedgerTransaction",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("usage", "Usage"),
                            ("top_up", "Top Up"),
                            ("reversal", "Reversal"),
                            ("adjustment", "Adjustment"),
                            ("residue", "Residue"),
                        ],
                        max_length=16,
                    ),
                ),
                ("request_id", models.UUIDField(blank=True, null=True)),
                ("note", models.CharField(blank=True, max_length=500)),
                ("at", models.DateTimeField()),
                (
                    "reverses",
                    models.OneToOneField(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="reversal",
                        to="billing.ledgertransaction",
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="LedgerEntry",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("amount", models.DecimalField(decimal_places=15, max_digits=38)),
                ("quantity", models.BigIntegerField(blank=True, null=True)),
                ("unit", models.CharField(blank=True, max_length=32)),
                (
                    "account",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="entries", to="billing.ledgeraccount"
                    ),
                ),
                (
                    "transaction",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="entries",
                        to="billing.ledgertransaction",
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="PriceVersion",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("number", models.PositiveIntegerField()),
                ("input_nano_per_mtok", models.BigIntegerField()),
                ("cached_nano_per_mtok", models.BigIntegerField()),
                ("output_nano_per_mtok", models.BigIntegerField()),
                ("valid_from", models.DateTimeField()),
                ("valid_to", models.DateTimeField(blank=True, null=True)),
                ("published_at", models.DateTimeField(blank=True, null=True)),
                (
                    "price",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="versions", to="billing.price"
                    ),
                ),
            ],
        ),
        migrations.AddField(
            model_name="ledgertransaction",
            name="price_version",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="+",
                to="billing.priceversion",
            ),
        ),
        CreatePartitionedModel(
            name="UsageRecord",
            fields=[
                ("request_id", models.UUIDField(primary_key=True, serialize=False)),
                ("tenant", models.CharField(max_length=48)),
                ("tier", models.CharField(max_length=48)),
                ("pool", models.CharField(max_length=200)),
                ("engine", models.CharField(max_length=200)),
                ("epoch", models.IntegerField()),
                ("reason", models.CharField(max_length=32)),
                ("code", models.CharField(blank=True, max_length=64)),
                ("prompt_tokens", models.BigIntegerField()),
                ("cached_tokens", models.BigIntegerField()),
                ("completion_tokens", models.BigIntegerField()),
                ("wasted_tokens", models.BigIntegerField()),
                ("engine_s", models.FloatField()),
                ("joules", models.FloatField()),
                ("queued_s", models.FloatField(null=True)),
                ("prefill_s", models.FloatField(null=True)),
                ("decode_s", models.FloatField(null=True)),
                ("parked_s", models.FloatField()),
                ("parks", models.IntegerField()),
                ("finished_at", models.DateTimeField()),
                ("currency", models.CharField(max_length=3)),
                ("money", models.DecimalField(decimal_places=15, max_digits=38)),
                (
                    "price_version",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="billing.priceversion",
                    ),
                ),
            ],
        ),
        migrations.AddConstraint(
            model_name="ledgeraccount",
            constraint=models.UniqueConstraint(
                fields=("kind", "tenant", "currency"), name="ledger_account_once", nulls_distinct=False
            ),
        ),
        migrations.AddConstraint(
            model_name="ledgeraccount",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("kind", "tenant"), ("tenant__isnull", False)),
                    models.Q(("kind", "tenant"), _negated=True),
                    _connector="OR",
                ),
                name="ledger_account_tenant",
            ),
        ),
        migrations.AddConstraint(
            model_name="priceversion",
            constraint=models.UniqueConstraint(fields=("price", "number"), name="price_version_number"),
        ),
        migrations.AddConstraint(
            model_name="priceversion",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("cached_nano_per_mtok__gte", 0), ("input_nano_per_mtok__gte", 0), ("output_nano_per_mtok__gte", 0)
                ),
                name="price_version_not_negative",
            ),
        ),
        migrations.AddConstraint(
            model_name="priceversion",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("valid_to__isnull", True), ("valid_to__gt", models.F("valid_from")), _connector="OR"
                ),
                name="price_version_interval",
            ),
        ),
        migrations.AddIndex(
            model_name="ledgertransaction",
            index=models.Index(
                condition=models.Q(("request_id__isnull", False)), fields=["request_id"], name="ledger_by_request"
            ),
        ),
        migrations.AddConstraint(
            model_name="ledgertransaction",
            constraint=models.UniqueConstraint(
                condition=models.Q(("kind", "usage")), fields=("request_id",), name="ledger_usage_once"
            ),
        ),
        migrations.AddConstraint(
            model_name="ledgertransaction",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("kind", "reversal"), ("reverses__isnull", False)),
                    models.Q(models.Q(("kind", "reversal"), _negated=True), ("reverses__isnull", True)),
                    _connector="OR",
                ),
                name="ledger_reversal_names_what",
            ),
        ),
        migrations.AddIndex(
            model_name="usagerecord",
            index=models.Index(fields=["tenant", "-request_id"], name="usage_by_tenant"),
        ),
        migrations.AddIndex(
            model_name="usagerecord",
            index=models.Index(fields=["finished_at"], name="usage_by_finish"),
        ),
    ]
