"""Who runs next, who yields: one class a policy, chosen by name."""

from __future__ import annotations

import importlib
import inspect

from policies.base import Policy
from policies.fair import Fair
from policies.fcfs import Fcfs
from policies.priority import Priority
from policies.static import Static

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Fcfs, Priority, Fair, Static)}


class PolicyError(ValueError):
    """No such policy, or not with these settings; the message says what there is."""


def load_policy(name: str, **settings: object) -> Policy:
    """Build a policy from a name (`fcfs`, `priority`, `fair`, `static`) or `package.module:Class`.

    `settings` are the keyword arguments of its constructor. Raises PolicyError.
    """
    policy = POLICIES.get(name) or _imported(name)
    known = list(inspect.signature(policy).parameters)
    for setting in settings:
        if setting not in known:
            offered = f"its settings are: {', '.join(known)}" if known else "it has no settings"
            raise PolicyError(f"policy {name!r} has no setting {setting!r}; {offered}")
    try:
        return policy(**settings)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"policy {name!r} refuses its settings {settings}: {error}") from error


def _imported(name: str) -> type[Policy]:
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise PolicyError(
            f"unknown policy {name!r}; there are {', '.join(POLICIES)}, "
            "or name your own as package.module:Class"
        )
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PolicyError(f"policy {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise PolicyError(f"policy {name!r} is not a subclass of policies.base.Policy")
    return found
