"""What runs next: request, scheduler, batch, model runner, sampler, step loop. Imports nothing heavy by itself."""
