# Train alone, talk to the model, measure it, take it elsewhere: "You train alone" of docs/quickstart.md.
gym configs copy nano-sft
gym train nano-sft.yaml
gym chat runs/nano-sft --prompt "double: abc"
gym data score runs/nano-sft --task double --num 50
gym eval runs/nano-sft --suite tiny
gym export runs/nano-sft -o exported/nano-sft
