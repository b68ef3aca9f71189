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
    "generate": "Continue a text: a trained language model adds the most probable token again and again.",
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
# What `-h` shows below the options of a command: a line or more that can be typed.
EXAMPLES = {
    "train": (
        "hvdkit train resnet20-digits --framework pytorch -np 2",
        "hvdkit train gpt-tiny -np 2 epochs=2 optimizer.learning_rate=0.002 --out runs/gpt",
        "hvdkit train resnet20-digits -np 8 -H node1:4,node2:4 --out runs/digits --resume",
    ),
    "launch": ("hvdkit launch -np 4 train.py --epochs 5", "hvdkit launch -np 4 --runtime pytorch -- ./run.sh"),
    "evaluate": ("hvdkit evaluate runs/photos --framework mxnet", "hvdkit evaluate runs/photos data.path=others"),
    "export": ("hvdkit export runs/photos --out model.onnx",),
    "compare": (
        "hvdkit compare resnet20-digits -np 1 -np 2 --rounds 6",
        "hvdkit compare resnet20-digits --framework pytorch -np 2 --rival plain --rival ddp",
    ),
    "parity": ("hvdkit parity resnet20-digits -np 2 --steps 5",),
    "predict-images": ("hvdkit predict-images runs/photos picture.jpg --top 3",),
    "diff": ("hvdkit diff runs/first runs/second",),
    "generate": ('hvdkit generate runs/gpt --prompt "The statement " --new-tokens 200',),
    "submit": (
        "hvdkit submit resnet20-digits -np 8 --nodes 2 --gpus-per-node 4 --time 2:00:00 --apply",
        "hvdkit submit -np 8 --nodes 2 --requeue -- train.py --epochs 5",
    ),
    "bench links": ("hvdkit bench links -H node1,node2 --every 10m --for 24h",),
    "bench": ("hvdkit bench allreduce -np 8 -H node1:4,node2:4 --out runs/links",),
    "hosts": ("hvdkit hosts -n 4 --mbit-per-s 100 -- hvdkit train resnet20-digits -np 4 -H HOSTS",),
    "predict": (
        "hvdkit predict runs/profile/profile.json --cluster aws-p3-16xlarge -n 8 -n 64",
        "hvdkit predict runs/profile/profile.json --cluster aws-p3-16xlarge --sweep n=8,16,...,1024",
    ),
    "advise": ("hvdkit advise runs/profile/profile.json --cluster aws-p3-16xlarge -n 64",),
    "plan": (
        "hvdkit plan gpt2 model.name=gpt2-xl precision=fp16 --cluster aws-p3-16xlarge -n 64 --new-recipe xl.yaml",
    ),
    "memory": ("hvdkit memory resnet50-imagenet batch_size=128 -n 8 --device 16GiB",),
    "profile": (
        "hvdkit profile resnet20-digits --framework pytorch -np 2",
        "hvdkit profile --from resnet50 --device a100 --images-per-second 400 --batch-size 64",
    ),
    "report": ("hvdkit report runs/compared",),
    "doctor": ("hvdkit doctor", "hvdkit doctor -H node1:4,node2:4"),
    "runtime build": ("hvdkit runtime build pytorch",),
    "runtime add": ("hvdkit runtime add pytorch --python /opt/conda/bin/python",),
    "runtime list": ("hvdkit runtime list",),
    "horovod wheel": ("hvdkit horovod wheel --python /opt/conda/bin/python --out wheels",),
    "recipes list": ("hvdkit recipes list",),
    "recipes copy": ("hvdkit recipes copy gpt-tiny mine", "hvdkit recipes copy pytorch mine"),
    "tokenizer train": ("hvdkit tokenizer train mine.txt --out tokens.json --vocabulary 8192",),
}
