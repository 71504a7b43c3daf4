"""The terminal dashboard: `feed.py` (where events come from), `view.py` (what is known), `widgets/` (what is
seen)."""
