"""Audits: what a contributor keeps of a training, its answer to an audit, and the auditor's check of the answer."""
