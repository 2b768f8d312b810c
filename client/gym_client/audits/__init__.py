"""Audits: the contributor's record of its training, its answer to an audit, and the auditor's check of the answer."""
