"""Who may speak to the hub: enrolment, invites, keys, nodes, sessions."""
