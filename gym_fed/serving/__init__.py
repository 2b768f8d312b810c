"""One base model in memory, thousands of personal variants beside it.

with VariantStore.open("variants", base=spec, layout=mixed.layout) as store, Engine(mixed, tokenizer, store) as engine:
    print(engine.submit(GenerationRequest(prompt_ids=ids, variant="alice")).result().text)

Neighbours: imports addresses, config, data, delta, errors, failpoints, files, identity, modeling, models,
open_files, system_errors, version; imported by cli, personalization.
"""
