from django.db import migrations

from tenants.guards import append_only, mutable_again

HISTORY = ("metering_requestoutcome", "metering_refusaltally")


class Migration(migrations.Migration):
    dependencies = [("metering", "0001_initial"), ("tenants", "0002_guards"), ("billing", "0001_initial")]

    operations = [migrations.RunSQL(append_only(table), mutable_again(table)) for table in HISTORY]
