# Make a variant, compare it with its base, serve it in an app: "You want a variant of your own" of docs/quickstart.md.
# ask.py stands on the page, and beside this script.
gym data generate --task shout --num 200 mine.jsonl
gym variant create --data mine.jsonl --user me --steps 40
gym chat gym-nano --prompt "shout: dxec"
gym chat gym-nano --variant me --prompt "shout: dxec"
gym api # stays: what follows is typed into another terminal
python ask.py
