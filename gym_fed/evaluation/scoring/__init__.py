"""Log-likelihoods and answers for evaluation, of one model or of many variants of one base in one pass."""
