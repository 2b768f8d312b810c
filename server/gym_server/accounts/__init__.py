"""Contributor accounts: enrolment, invites, keys, nodes and sessions."""
