"""Accounts of contributors: enrolment, invites, keys, nodes, sessions."""
