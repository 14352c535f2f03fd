"""The numbers that llm.c's files begin with, and what each file is. Leaves out reading any of them."""

MODEL = 20240326
DEBUG_STATE = 20240327
TOKENIZER = 20240328
GPT2_TOKENS = 20240520
EVALUATION = 20240522
TRAINING_STATE = 20240527
LLAMA3_TOKENS = 20240801
LLAMA3_MODEL = 20240803

MEANINGS = {
    MODEL: "a GPT-2 checkpoint of llm.c (give it to -e)",
    DEBUG_STATE: "a debug state of llm.c",
    TOKENIZER: "a tokenizer file of llm.c (give it to --tokenizer)",
    GPT2_TOKENS: "a file of GPT-2 tokens (give it to -i or -j)",
    EVALUATION: "an evaluation file of llm.c (HellaSwag)",
    TRAINING_STATE: "a training state of llm.c",
    LLAMA3_TOKENS: "a file of Llama 3 tokens (give it to -i or -j)",
    LLAMA3_MODEL: "a Llama 3 model of llm.c",
}
