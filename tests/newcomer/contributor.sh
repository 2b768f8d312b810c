# Join the hub of somebody else for a round: "You contribute" of docs/quickstart.md.
gym data generate --task double --num 500 my.jsonl
gym-client join --server 127.0.0.1:9443 --data my.jsonl
