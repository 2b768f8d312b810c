"""One base model in memory, thousands of personal variants beside it.

with VariantStore.open("variants", base=spec, layout=mixed.layout) as store, Engine(mixed, tokenizer, store) as engine:
    print(engine.submit(GenerationRequest(prompt_ids=ids, variant="alice")).result().text)
"""
