"""`gym doctor`: what this installation is made of, what is amiss with it, and what to do about that.

A check is one function in a module of ``gym_fed/doctor/checks``; dropping a file there adds it.
"""

from gym_fed.doctor.finding import Finding, Level
from gym_fed.doctor.registry import check, checks, run_checks, worst

__all__ = ["Finding", "Level", "check", "checks", "run_checks", "worst"]
