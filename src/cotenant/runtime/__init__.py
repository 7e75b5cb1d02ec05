"""The worker: the loop and its executor. The only place where engine, finetune, scheduler and device meet."""
