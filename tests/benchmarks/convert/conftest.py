"""State directories as tests of the service have them."""

from __future__ import annotations

from tests.service.conftest import empty_database, home

__all__ = ["empty_database", "home"]
