"""The commands, a module each: what is asked for, how it is answered, what people read (`request.py`)."""

# All with what `hvdkit --help` says of them, in its order: nothing of a command is imported for that.
COMMANDS = {
    "train": "Train a recipe under one framework.",
    "launch": "Run any program that uses Horovod, as horovodrun does: output by rank, who failed and why, what hangs.",
    "evaluate": "Evaluate a checkpoint, under the framework that trained it or another one.",
    "export": "Write a checkpoint's model as one file for others: safetensors, ONNX or a Keras archive.",
    "compare": "Check that several frameworks do the same work, train a recipe under each, and compare the results.",
    "parity": "Check in float64, step by step, that frameworks compute what PyTorch computes; "
    "status 1 if one does not.",
    "predict-images": "Say what is in pictures: their most probable classes by a trained model.",
    "diff": "Compare two runs: settings, versions, the first step with another loss, weights; status 1 if they differ.",
    "generate": "Go on with a text: a trained language model adds the most probable token again and again.",
    "submit": "Write training as a job for a scheduler: a file that a person can read, with the resolved recipe.",
    "bench links": "Measure latency and bandwidth between every two hosts, once or for a day, beside the rated figure.",
    "bench": "Time a collective by size, check each element, and write a cluster file for `hvdkit predict`.",
    "hosts": "Run a command on hosts with slow links, which this machine plays.",
    "predict": "Predict step time, speed and what bounds them, at any number of ranks, "
    "from a profile and a cluster file.",
    "advise": "Rank what would make training faster or cheaper, in software and hardware, each by its predicted gain.",
    "plan": "Say which strategy trains a recipe on a cluster, by memory and predicted time, and why not another.",
    "memory": "Count the memory that a recipe needs, by part and stage of sharding, without running anything.",
    "profile": "Measure where the time of a step goes, by layer and by rank, and show what bounds it.",
    "report": "Make one page of a comparison or a run, report.html, and report.md for pull requests.",
    "doctor": "Show what is installed and what is broken, with the command that repairs it: here, or on other hosts.",
    "runtime build": "Build the runtimes that are missing or out of date, and test each with two processes.",
    "runtime add": "Use an interpreter of your own as a runtime.",
    "runtime list": "List the runtimes.",
    "horovod wheel": "Build a Horovod for any environment and test it there; the environment is not changed.",
    "recipes list": "List the recipes that come with hvdkit, each with a description.",
    "recipes copy": "Copy a recipe, or the script that runs recipes under a framework, for you to change.",
    "tokenizer train": "Train a byte-level BPE tokenizer on a text, as GPT-2 has one.",
}
# The first words of commands that have two.
GROUPS = {
    "runtime": "Python environments, each with a framework and a tested Horovod.",
    "horovod": "Horovod for an environment of your own.",
    "recipes": "The recipes that come with hvdkit.",
    "tokenizer": "Tokenizers for text: which pieces of it a language model sees.",
}
# Where `hvdkit --help` shows them, by their first words.
PANELS = {
    "Train": "train launch submit evaluate export generate predict-images tokenizer recipes",
    "Compare": "compare parity diff report",
    "Measure and predict": "profile bench predict plan advise memory",
    "Environment": "doctor hosts runtime horovod",
}
