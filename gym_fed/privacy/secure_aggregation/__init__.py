"""Secure aggregation: contributors mask integer votes, and the hub learns only their sum.

The protocol is figure 4 of Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", with signed keys. The modules here perform no input or output except for files of votes;
``gym_client.privacy.secure_round`` and ``gym_server.privacy.secure_round`` run the protocol with them.
"""
