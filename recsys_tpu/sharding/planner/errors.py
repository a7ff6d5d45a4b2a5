"""Errors of the planner that a user can mend."""

from __future__ import annotations

from recsys_tpu.errors import UserError


class PlanError(UserError, ValueError):
    """Base of the planner's errors."""


class PlanInputError(PlanError):
    """A table, topology, constraint or file given to the planner cannot be used."""


class InfeasibleError(PlanError):
    """No plan fits in HBM under the constraints; the message says which term is too large."""


class PlanDriftError(PlanError):
    """A plan file does not belong to these tables or this topology."""
