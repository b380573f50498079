from __future__ import annotations

from user_folder import fitted, here, place

__all__ = ["fitted", "here", "place"]
