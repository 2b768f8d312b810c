"""Serve one base model together with many small variants of it.

with (
    VariantStore.open("variants", base=spec, layout=served.layout) as store,
    Engine(served, tokenizer, store) as engine,
):
    print(engine.submit(GenerationRequest(prompt_ids=ids, variant="alice")).result().text)
"""
