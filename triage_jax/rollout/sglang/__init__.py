"""An SGLang server as the rollout engine, over HTTP."""
