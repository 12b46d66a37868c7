"""Schema history of the app label `metering`. Rows that must never change are guarded here by triggers, not by good manners."""
