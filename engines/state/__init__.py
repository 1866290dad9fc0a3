"""Training state, the same for all engines: everything that a run needs to go on as if it had never stopped.

    directory   names, markers, the latest, retention: plain files, no torch
    entries     which tensors there are, by the mapping tables' names, and which boxes of them this rank holds
    shards      those boxes in torch's distributed checkpoint form (DCP): laid out, written, read
    extras      random-number states and the optimizer's scalars as JSON
    saving      `Saver`: now, or behind the training's back
    beside      a rank's file in shared memory, written from there by a process (`writer`)
    loading     `load`: on the same ranks bit for bit, on others by box

A state directory:

    step-000012/
      dcp/             `model.<name>`, `optim.exp_avg.<name>`, …: torch loads it, `areal-convert` converts it
      rng/rank-00000.json
      hf/              config, tokenizer, generation config of the base model
      trainer.json     step, tokens, schedule, data position, version, model, topology, optimizer's scalars
      config.yaml      the run's resolved config
      COMPLETE         written last: every file with its size and digest

No file of it is ever unpickled by Python: `.metadata` is read by the converter's own machine.
"""
