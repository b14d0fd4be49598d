"""Nobody speaks for another tenant, and the number of tenants is bounded."""

from __future__ import annotations

import pytest

from app import tenants
from app.api_error import ApiError
from app.tenants import OVERFLOW, Tenants, digest


def test_a_key_names_its_tenant_whatever_the_header_claims() -> None:
    door = Tenants({digest("k1"): "alice", digest("k2"): "bob"}, 10)
    assert door.of({"authorization": "Bearer k1", "x-tenant-id": "bob"}) == "alice"
    assert door.of({"authorization": "bearer  k2"}) == "bob"


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer k3", "Basic k1", "k1"])
def test_without_a_valid_key_there_is_no_tenant(header: str) -> None:
    with pytest.raises(ApiError) as refused:
        Tenants({digest("k1"): "alice"}, 10).of({"authorization": header, "x-tenant-id": "alice"})
    assert refused.value.status == 401
    assert "k1" not in refused.value.message


def test_without_keys_a_tenant_names_itself() -> None:
    door = Tenants({}, 10)
    assert door.of({}) == "default"
    assert door.of({"x-tenant-id": "a" * 64}) == "a" * 64


@pytest.mark.parametrize("name", ["", "a" * 65, "a b", "-a", "ä", "a/b", "a\n"])
def test_a_tenant_name_that_would_not_do_as_a_label_is_refused(name: str) -> None:
    with pytest.raises(ApiError, match="X-Tenant-Id") as refused:
        Tenants({}, 10).of({"x-tenant-id": name})
    assert refused.value.status == 400


def test_names_beyond_the_bound_share_one_until_a_place_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("app.tenants.time.monotonic", lambda: now)
    door = Tenants({}, 2)
    assert [door.of({"x-tenant-id": name}) for name in ("a", "b", "c", "a")] == ["a", "b", OVERFLOW, "a"]
    now = tenants.IDLE_SECONDS + 1
    assert door.of({"x-tenant-id": "a"}) == "a"
    assert door.of({"x-tenant-id": "c"}) == "c"  # b has been idle for longest
    assert door.of({"x-tenant-id": "b"}) == OVERFLOW
