from django.db import migrations

from tenants.guards import CREATE_REFUSE, DROP_REFUSE, append_only, mutable_again


class Migration(migrations.Migration):
    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.RunSQL(CREATE_REFUSE, DROP_REFUSE),
        migrations.RunSQL(append_only("tenants_auditevent"), mutable_again("tenants_auditevent")),
    ]
