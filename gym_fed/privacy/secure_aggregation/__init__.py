"""Secure aggregation: contributors mask integer votes, and the hub learns only their sum.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (figure 4), with signed
keys. The parts are pure; ``gym_client.privacy.secure_round`` and ``gym_server.privacy.secure_round`` speak the protocol
with them.
"""
