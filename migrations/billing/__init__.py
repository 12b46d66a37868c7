"""Schema history of the app label `billing`. Rows that must never change are guarded here by triggers, not by good manners."""
