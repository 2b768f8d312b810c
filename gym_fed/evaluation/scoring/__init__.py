"""Log-likelihoods and answers for evaluations, for one model or many variants of a base in one pass."""
