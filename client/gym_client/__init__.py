"""The agent: Flower client app, keystore, policy, upload, `gym-client`."""
