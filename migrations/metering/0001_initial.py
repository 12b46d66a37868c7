from django.db import migrations, models

from tenants.partitions import CreatePartitionedModel


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="DirtyMinute",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("minute", models.DateTimeField(db_index=True)),
            ],
        ),
        migrations.CreateModel(
            name="StreamCursor",
            fields=[
                ("stream", models.CharField(max_length=100, primary_key=True, serialize=False)),
                ("last_id", models.CharField(max_length=48)),
            ],
        ),
        migrations.CreateModel(
            name="MinuteRollup",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("minute", models.DateTimeField()),
                ("tenant", models.CharField(blank=True, max_length=48)),
                ("tier", models.CharField(blank=True, max_length=48)),
                ("pool", models.CharField(blank=True, max_length=200)),
                ("requests", models.IntegerField()),
                ("refused", models.IntegerField()),
                ("errors", models.IntegerField()),
                ("prompt_tokens", models.BigIntegerField()),
                ("cached_tokens", models.BigIntegerField()),
                ("completion_tokens", models.BigIntegerField()),
                ("wasted_tokens", models.BigIntegerField()),
                ("currency", models.CharField(blank=True, max_length=3)),
                ("money", models.DecimalField(decimal_places=15, max_digits=38)),
                ("ttft_met", models.IntegerField()),
                ("ttft_missed", models.IntegerField()),
                ("tpot_met", models.IntegerField()),
                ("tpot_missed", models.IntegerField()),
                ("good", models.IntegerField()),
                ("judged", models.IntegerField()),
                ("ttft_p50_s", models.FloatField(null=True)),
                ("ttft_p95_s", models.FloatField(null=True)),
            ],
            options={
                "indexes": [models.Index(fields=["tenant", "minute"], name="rollup_by_tenant")],
                "constraints": [
                    models.UniqueConstraint(fields=("minute", "tenant", "tier", "pool"), name="rollup_once")
                ],
            },
        ),
        migrations.CreateModel(
            name="RefusalTally",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("minute", models.DateTimeField()),
                ("tenant", models.CharField(blank=True, max_length=48)),
                ("tier", models.CharField(blank=True, max_length=48)),
                ("pool", models.CharField(blank=True, max_length=200)),
                ("status", models.IntegerField()),
                ("code", models.CharField(max_length=64)),
                ("count", models.IntegerField()),
            ],
            options={
                "indexes": [models.Index(fields=["minute"], name="refusals_by_minute")],
            },
        ),
        CreatePartitionedModel(
            name="RequestOutcome",
            fields=[
                ("request_id", models.UUIDField(primary_key=True, serialize=False)),
                ("tenant", models.CharField(max_length=48)),
                ("project", models.CharField(max_length=48)),
                ("key", models.CharField(max_length=16)),
                ("tier", models.CharField(max_length=48)),
                ("pool", models.CharField(max_length=200)),
                ("model", models.CharField(max_length=200)),
                ("kind", models.CharField(max_length=16)),
                ("stream", models.BooleanField()),
                ("status", models.IntegerField()),
                ("reason", models.CharField(max_length=32)),
                ("code", models.CharField(blank=True, max_length=64)),
                ("client_request_id", models.CharField(blank=True, max_length=200)),
                ("received_at", models.DateTimeField()),
                ("finished_at", models.DateTimeField()),
                ("ttft_s", models.FloatField(null=True)),
                ("tpot_s", models.FloatField(null=True)),
                ("stall_s", models.FloatField(null=True)),
                ("total_s", models.FloatField()),
                ("delivered_tokens", models.BigIntegerField()),
                ("prompt_tokens", models.BigIntegerField()),
                ("ttft_target_ms", models.IntegerField(null=True)),
                ("tpot_target_ms", models.IntegerField(null=True)),
                ("ttft_met", models.BooleanField(null=True)),
                ("tpot_met", models.BooleanField(null=True)),
                ("good", models.BooleanField()),
            ],
            options={
                "indexes": [
                    models.Index(fields=["tenant", "-request_id"], name="outcome_by_tenant"),
                    models.Index(fields=["finished_at"], name="outcome_by_finish"),
                ],
            },
        ),
    ]
