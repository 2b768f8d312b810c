"""The commented config that `gym-server init` writes."""

from __future__ import annotations

SMALL_RECIPE = """\
  per_device_train_batch_size: 16
  max_length: 256"""
LARGE_RECIPE = """\
  lr_scheduler_type: cosine
  warmup_steps: 5
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 2
  max_length: 512"""
FROZEN_A = """\
  lora: {freeze_a: true}        # noise on both factors would be multiplied by itself"""

TEMPLATE = """\
# Config of a gym-fed hub. Unknown keys are refused; `gym-server run --set a.b=c` overrides a key.

name: {name}
listen: {listen:<22}  # 0.0.0.0:9443 accepts connections from other machines
{advertise}  # address in invites, if it differs from `listen`; required with 0.0.0.0

base_model: {base_model}        # gym-nano, a model folder or a Hugging Face name; all contributors need these weights
# serve_base: auto              # auto | true | false: send the base to contributors who lack it. auto: if the licence
                                # in the model card permits it (apache-2.0, mit, ...); true: you have permission

enrolment:
  policy: {policy}              # open | invite | allow-list
  # allow_list: [c0123456789abcdef0123456789abcdef]   # ids printed by `gym-client id`

rounds:
  num_rounds: {num_rounds}
  min_contributors: {min_contributors:<10}  # minimum quorum; a round with fewer updates at its deadline is aborted
  quorum_share: 0.5             # more than this share of the contributors with the task must answer, too
  deadline_seconds: 1800
  lease_seconds: 60             # a contributor that is silent for this long loses its task
  grace_factor: 1.5             # after the quorum, the others get this multiple of their usual time
  grace_min_seconds: 30         # but at least this long
  # grace_max_seconds: 900      # and at most this long; default: as long as members usually take
  backoff_seconds: 5            # wait after an aborted round; doubles with each consecutive one
  backoff_max_seconds: 300      # the longest wait
  learning_rate_decay: 1.0      # multiplies the recipe's learning rate after every committed round
  # mode: continuous            # wait for nobody (docs/coordinate.md)
  # merge_every: 8              # continuous: weight of updates at which a round is merged
  # max_staleness: 20           # continuous: maximum age of an update, in versions
  # audit: {{rows: public, auditors: [ID]}}   # repeat drawn training steps of LoRA updates (docs/audits.md)

# How every contributor trains, with the key names of `gym train`.
recipe:
  algorithm: sft                # sft | pretrain | dpo | kto | orpo | simpo | tdpo
  finetuning: {finetuning:<16}  # full | lora, or a method of an installed package
  max_steps: 50
  learning_rate: {learning_rate:<13}  # {rate_reason}
{recipe_rest}
  # keep_optimizer_state: true  # full: contributors keep AdamW's moments on disk, 8 bytes per weight and update

# How updates are encoded: one bit per weight. Error feedback adds the rounding error to the next update.
codec:
  codec: bitdelta               # or another codec of docs/codecs.md or of an installed package
  error_feedback: true

# How updates are merged into one soup.
soup:
  aggregator: {aggregator:<18} # see `gym soup rules`: mean, trimmed_mean, multi_krum, ... With a hundred clean rows
                                # in `root` below it judges long updates by their effect (docs/robustness.md)
  num_malicious_nodes: {num_malicious_nodes:<7}  # number f of malicious updates to withstand; needs 2f+1 updates
  # pre_aggregators: [nnm]      # steps before the aggregator
  # server_optimizer: momentum  # none | momentum | nesterov | adam | yogi
  server_learning_rate: 1.0
  # codec: {{codec: lattice}}     # how soups are sent back; by default integers on a lattice, and with finetuning: lora
                                # LoRA factors (as-merged)

# The hub sees only the sum of the updates' signs (docs/secure-aggregation.md). It needs the settings that `privacy`
# below needs, except for soup: aggregator mean or majority_vote, and num_malicious_nodes: 0.
# secure_aggregation:
#   threshold: 3                # contributors that must finish a round; more than half of those that start it
#   step_norm: 1.0              # L2 norm of the step that the signs of one contributor represent

admission:
  max_update_bytes: 2147483648
  norm_ratio: {norm_ratio:<17} # an update this many times larger than the median is rejected

# The held-out set decides whether a soup is kept. Without it every soup is kept.
gate:
  {heldout:<28}  # Alpaca, ShareGPT, messages or text; or task:NAME,task:NAME
  max_loss_increase: 0.02       # nats
  screen_updates: {screen_updates:<13} # also test each update alone, at its share of the soup
  max_update_loss_increase: 0.05 # nats
  # evals: [{{suite: tiny, limit: 64, max_drop: 0.02}}]  # tasks that a soup must not worsen (docs/evaluation-gate.md)
  # safety: {{max_margin_drop: 0.2}}  # nats per token: maximum drop of the refusal margin (docs/safety.md)

# At the end of the run: held-out loss and retained knowledge of the newest version, compared with version 0.
check: true

# A hundred or more clean rows that are not in gate.heldout. The hub trains its own update on them. Updates that point
# away from it get no weight. An update that is longer than most keeps its length if that lowers the loss on these rows.
# The soup gets the length with the lowest loss. Rare knowledge then keeps its weight and attacks lose theirs, if the
# rows cover everything that contributors may know.
{root}

rewards:
  pool: 1000                    # credits per round
  score: {score:<16}       # how updates are scored on gate.heldout; participation: no scoring (docs/rewards.md)
  # quality_weight: 0.8         # share of the pool paid by score; the rest goes to all merged contributors
  # credits_per_nat: 10000      # limit on pay by score, per nat of held-out loss; the rest stays in the pool
  similarity_threshold: {similarity_threshold:<7} # cosine above which the later of two updates is rejected as a copy
  together_threshold: {together_threshold:<9} # excess over the round's typical cosine above which two are paid as one
  stale_threshold: {stale_threshold:<12} # cosine above which an update counts as an earlier one sent again
  min_norm_ratio: {min_norm_ratio:<13} # below this fraction of the median norm an update counts as zero
  hold_seconds: 604800          # delay before credits can be transferred, and before a transfer settles (docs/keys.md)

# Differential privacy of the soups (docs/privacy.md). It needs soup.aggregator root_gate with `root` above (the most
# robust to malicious clients), or mean, trimmed_mean or median; without soup.aggregator it is root_gate or mean.
# It also needs admission.norm_ratio: null; gate.screen_updates: false; and under rewards similarity_threshold,
# together_threshold and stale_threshold: null, min_norm_ratio: 0. `gym-server init --epsilon 8` writes all of them.
{on}privacy:
{on}  noise_multiplier: {noise_multiplier:<9} # standard deviation of the noise over the sensitivity to one contributor
{on}  clipping_norm: 1.0          # updates with a larger L2 norm are scaled down to it
{on}  epsilon: {epsilon:<18} # budget of the whole run; a round that would exceed it does not start
{on}  end_when_spent: false       # true: num_rounds may exceed the budget; the run then ends early
{on}  target_delta: 1.0e-5

# Personal variants that contributors store on the hub (docs/coordinate.md).
# variants:
#   max_per_contributor: 100
#   max_bytes_per_contributor: 4294967296
#   max_total_bytes: 68719476736

# Limits per account and per address (docs/coordinate.md).
# limits:
#   nodes_per_account: 8        # installations of one account
#   streams_per_account: 4      # installations that wait for work at the same time
#   calls_per_account: 8        # concurrent calls
#   calls_per_second_of_account: 10
#   calls_per_second: 30        # from one address before login
#   calls_per_address: 64       # concurrent calls before login; raise it for a class behind one address
#   connections: 8000           # in total
#   connections_per_address: 256
#   handshake_seconds: 5        # a connection without a finished TLS handshake is closed
#   idle_upload_seconds: 30     # an upload without data for this long is closed; it can be resumed
#   enrolments_per_minute: 6    # new accounts and wrong invites, per address
#   enrolment_work_bits: 20     # policy open: bits of the proof of work; 20 take a core about a second
#   account_changes_per_hour: 12 # key replacements, and returns after leaving, per account
#   transfers_per_hour: 60      # credit transfers per account
#   unreferenced_bytes_per_account: 4294967296 # uploads that no merged update or variant uses

storage:
  database: sqlite:///hub.db    # or postgresql+psycopg://USER@HOST/DATABASE with the password in PGPASSFILE
  objects: objects              # a folder, or s3://BUCKET/PREFIX (docs/coordinate.md)
  # max_local_copy_bytes: 8589934592 # limit on local copies of remote objects
  # keep_unneeded_seconds: 86400 # refused updates and unused uploads are deleted after this time
  # reserve_bytes: 268435456    # minimum free disk space: below it no upload begins and no round opens

# Web pages of the hub (docs/dashboard.md); the same as `gym-server run --dashboard`.
# dashboard:
#   listen: 127.0.0.1:9444      # another address needs a key: gym-server dashboard-keys add
#   public: false               # true: no key is needed to view the pages
#   ask: false                  # true: a separate process answers prompts with the newest version
#   prompts: []                 # at most 10 prompts, which are answered after every round
"""
