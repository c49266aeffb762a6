"""The method study: what each part of PARA-GRPO buys, with seeds and intervals; see study/dvc.yaml."""
