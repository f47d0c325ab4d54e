"""Every field of a run, with its meaning and its default.

The bases of data sets add what belongs to the data; each config adds model, optimizer and exchange.
A field that is None takes the default of the method or the model that reads it. Options of other
methods are ignored, so flags can select any method on any config:

    --config.sync.method=majority_vote --config.optimizer.learning_rate=6e-3
    --config.sync.method=low_rank_mean --config.sync.rank=4
    --config.sync.method=one_bit_adam --config.optimizer.name=scale --config.sync.weight_decay=0.1
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    """An unlocked config without data, model and optimizer."""
    config = config_dict.ConfigDict()
    config.seed = 0  # For parameters, data order and random rounding.
    config.steps = 1000  # Optimizer steps.
    config.batch_size = 64  # Over all devices together.
    config.microbatches = 1  # Parts of a device's share, processed one after another.
    config.label_smoothing = 0.0  # The share of a label that is spread over all classes.
    config.eval_every = 100  # Steps between passes over the test set.
    # Steps timed with and without the exchange, for at most 20 s but at least a whole sync.every.
    config.measure_steps = 400

    config.data = config_dict.ConfigDict()
    config.data.name = ""
    config.data.data_dir = ""  # TFDS_DATA_DIR, or ~/tensorflow_datasets.
    config.data.train_split = "train"
    config.data.test_split = "test"
    # Or "by_label": device i has the classes congruent to i modulo N; classes have unequal weights
    # if N does not divide their number. Or "by_position": contiguous parts of a text.
    config.data.shards = "shuffled"
    # Or "crop_flip": shifted by up to 4 pixels, mirrored; "rand_augment": that, and two operations
    # of RandAugment; or a call, such as "rand_augment(layers=2, magnitude=5)".
    config.data.augment = "none"
    # 0: images keep their size and are kept in memory. Otherwise each is decoded when needed, and
    # cropped to this height and width: at random with an augmentation, else in the middle.
    config.data.image_size = 0
    config.data.sequence_length = config_dict.placeholder(int)  # Tokens in a row of text.
    # 0: each token of a text is predicted from those before it. Otherwise this share of the tokens,
    # such as 0.15, is masked and predicted from all others, as in BERT.
    config.data.masked = 0.0

    config.model = config_dict.ConfigDict()
    config.model.name = ""
    config.model.dtype = "float32"  # Of the computation; or "bfloat16". Parameters are float32.

    config.optimizer = config_dict.ConfigDict()
    config.optimizer.name = "sgd"  # Or "adamw", "muon"; "scale" after an optimizer.
    config.optimizer.learning_rate = 0.1  # The peak: it rises in warmup_steps, then falls to 0.
    config.optimizer.warmup_steps = 50
    config.optimizer.momentum = 0.9  # sgd, muon: Nesterov momentum; adamw: b1.
    config.optimizer.b2 = 0.999  # For adamw, and for muon's Adam.
    config.optimizer.nesterov = False  # For adamw: Nesterov momentum, which the others always have.
    config.optimizer.weight_decay = 0.0  # Inside the gradient with sgd, apart from it with others.
    # Clips the mean gradient to this norm, over all parameters together, after the exchange. With
    # sync.every or sync.local_optimizer, clips each device's own gradient. None: never.
    config.optimizer.clip_norm = config_dict.placeholder(float)

    config.sync = sync()

    config.guard = config_dict.ConfigDict()
    config.guard.bad_steps = 20  # This many steps in a row that are not finite end the run.
    config.guard.replicas_every = 100  # Steps between comparisons of the devices' parameters.
    config.guard.step_seconds = 300.0  # The longest that a step may take. 0: no limit.

    config.inspect = config_dict.ConfigDict()
    # Steps between looks at gradients, residuals, error and time of the exchange; 0: none. A look
    # takes as long as three steps and a float32 mean, and needs memory for a second state.
    config.inspect.every = 100

    config.checkpoint = config_dict.ConfigDict()
    config.checkpoint.every = 100  # Steps between checkpoints; the last step is always saved.
    config.checkpoint.keep = 2  # The newest ones; older ones are deleted.
    # "test_loss" or "test_accuracy" also keeps the best checkpoint by that score; every test is
    # then followed by a checkpoint. --evaluate tests the best one.
    config.checkpoint.best = ""
    config.checkpoint.resume = False  # Continue from the newest checkpoint of --workdir.

    config.profile = config_dict.ConfigDict()
    config.profile.steps = 0  # Traced after the tenth step, for TensorBoard.

    config.network = config_dict.ConfigDict()
    config.network.gigabits = config_dict.placeholder(float)  # None: measured in the run.
    config.network.probe_mib = 16  # Size of the exchange that measures the bandwidth.
    # For config.sync.method="auto", the planner's choice. With a cluster,
    # config.sync.algorithm=None is the fastest algorithm on it, for votes and for means in any
    # format but float32.
    config.network.cluster = ""  # A cluster.yaml, see docs/planner.md; "": links are measured.
    config.network.costs = ""  # A file of `python -m jaxcomm.probe`; "": measured in the run.
    config.network.quality = "16bit"  # Or "exact", "unbiased", "any".
    return config


def sync() -> config_dict.ConfigDict:
    """How the devices agree on a gradient, with the options of all methods."""
    sync = config_dict.ConfigDict()
    # mean, majority_vote, sparse_mean, low_rank_mean, factored_adam, one_bit_adam; "auto": the
    # planner's choice; "none": no exchange at all, a control.
    sync.method = "mean"
    sync.codec = config_dict.placeholder(str)  # A name, or a call such as "qsgd(levels=7)".
    sync.algorithm = config_dict.placeholder(str)  # None: jaxcomm chooses.
    sync.second_hop = config_dict.placeholder(str)  # The codec of the means; None: `codec`.
    sync.error_feedback = config_dict.placeholder(bool)  # Feed rounding errors back.
    sync.residual_dtype = config_dict.placeholder(str)  # Of these errors: "float32", "bfloat16".
    sync.exempt = ()  # Patterns of additional leaves that are sent in float32.
    # Steps in float32 before any compression; with `every`, rounded up to whole exchanges.
    sync.dense_steps = config_dict.placeholder(int)
    sync.bucket_mib = config_dict.placeholder(float)  # MiB of float32 gradients in a bucket.
    sync.implementation = config_dict.placeholder(str)  # Of kernels, such as "measure".
    # Local SGD and DiLoCo: devices take `every` steps of their own, then exchange how far they
    # moved. The steps of the run must be a multiple of `every`.
    sync.every = 1
    # Each device has its own optimizer, before the exchange: its step is sent, not the gradient.
    # Meant for few bits with error feedback, and for votes; accepted with all methods that are not
    # optimizers. With adamw and muon, only for shuffled data.
    sync.local_optimizer = False
    sync.outer_rate = 1.0  # Of the outer SGD, whose gradient is the exchanged difference.
    sync.outer_momentum = 0.0  # Nesterov momentum.
    sync.fragments = 1  # Parts of the leaves, which are exchanged in turn.
    # FSDP: splits parameters over the devices and gathers them in this codec. None: every device
    # has all parameters. For mean, majority_vote and none.
    sync.gather = config_dict.placeholder(str)
    # HSDP: groups of this many neighbouring devices hold one copy of the parameters, which XLA
    # splits; the exchange is between groups, in shards. 1: every device has all parameters.
    sync.fsdp = 1
    # For majority_vote:
    sync.ties = config_dict.placeholder(str)  # "random", "zero", "positive" or "negative".
    sync.zeros = config_dict.placeholder(str)  # "random" or "abstain".
    sync.local_momentum = 0.0  # Momentum on each device: Signum.
    sync.correct_every = 0  # Steps between means, in bfloat16, that correct the gradients.
    # For sparse_mean:
    sync.density = config_dict.placeholder(float)  # The share of values that is selected.
    sync.momentum_correction = config_dict.placeholder(float)  # Each device's own momentum.
    sync.residual_decay = config_dict.placeholder(float)  # Below 1, the residual is a momentum.
    sync.measure_xi = False  # The distance to the true top-k in the metrics: costs two means.
    # For low_rank_mean:
    sync.rank = config_dict.placeholder(int)  # Columns of a factor.
    # For factored_adam and one_bit_adam, which are optimizers:
    sync.b1 = config_dict.placeholder(float)  # The decay of the momentum.
    sync.b2 = config_dict.placeholder(float)  # The decay of the squares.
    sync.eps = config_dict.placeholder(float)  # Keeps divisors from zero.
    sync.weight_decay = config_dict.placeholder(float)  # Times the learning rate, as in AdamW.
    sync.nesterov = config_dict.placeholder(bool)  # For factored_adam: Nesterov momentum.
    sync.variance_stability = config_dict.placeholder(float)  # Ends 1-bit Adam's warm-up earlier.
    return sync
