"""Where models of a configuration are: in directories, in GGUF files, on the Hugging Face hub, or published with
Quintet's list. Finds their directories and reads their `config.json`; `quintet.pipelines.model_download` gets them."""
