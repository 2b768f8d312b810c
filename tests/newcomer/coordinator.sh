# Run a hub for a round with a friend: "You coordinate a community" and "The coordinator again" of docs/quickstart.md.
# Once the hub listens, the friend types contributor.sh into another terminal.
gym-server init --dir hub --name "our community" --enrolment open
gym-server run --dir hub --exit-when-done --set rounds.num_rounds=1 --set rounds.min_contributors=1 --set soup.num_malicious_nodes=0 --set recipe.max_steps=40
gym-server rounds --dir hub
gym-server rewards --dir hub
gym-server model merged --dir hub
gym chat merged --prompt "double: abc"
