"""Export a model to GGUF for llama.cpp, in 8 bits, and read the file back with the format's own library.

pip install 'gym-fed[export]'
python examples/export_gguf.py [FOLDER]     # half a minute on one core
"""

import sys
from pathlib import Path

from gguf import GGUFReader, dequantize

from gym_fed import Trainer, TrainingConfig
from gym_fed.data import generate

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/export_gguf")

config = TrainingConfig(
    model="gym-nano",
    output_dir=folder / "run",
    max_steps=10,
    per_device_train_batch_size=16,
    learning_rate=1e-3,
    max_length=64,
)
trainer = Trainer(config)
trainer.train(generate("double", 400))

# `check=True` reads the file back with llama-cpp-python, where that is installed; here gguf's own reader compares.
file = trainer.export(folder / "double.gguf", quantization="q8_0", check=False)
print(f"{file}: {file.stat().st_size:,} bytes; llama-server -m {file}")

reader = GGUFReader(file)
print(f"{len(reader.tensors)} tensors; chat template: {'tokenizer.chat_template' in reader.fields}")
ours = trainer.result.model.state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()
(theirs,) = (tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_up.weight")
difference = abs(dequantize(theirs.data, theirs.tensor_type) - ours).max()
print(f"largest difference of a weight: {difference:.5f}, of {abs(ours).max():.3f}")
