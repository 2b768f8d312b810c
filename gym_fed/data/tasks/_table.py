"""The tasks that are one function each, by name; to add one, decorate it in one of these modules."""

from gym_fed.data.tasks import _contributor, _lookups, _numbers, _strings
from gym_fed.data.tasks._made import TABLE

__all__ = ["TABLE", "_contributor", "_lookups", "_numbers", "_strings"]
