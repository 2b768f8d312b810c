"""One base model in memory, thousands of personal variants beside it.

with (
    VariantStore.open("variants", base=spec, layout=served.layout) as store,
    Engine(served, tokenizer, store) as engine,
):
    print(engine.submit(GenerationRequest(prompt_ids=ids, variant="alice")).result().text)

Neighbours: imports addresses, bounded, config, data, delta, errors, failpoints, file_lock, files, identity,
json_files, kinds, modeling, models, open_files, portable, system_errors, text, tokenizer_errors; imported by
cli, evaluation, export, personalization, quickstart, web, webui.
"""
