"""DPO, TDPO, KTO, ORPO and SimPO: answers that people prefer or reject. It imports no other family."""
