"""Dataset classes of a project, for ``data.custom_cls``."""

import datasets
from omegaconf import ListConfig
from torch.utils.data import Dataset

import verl.utils.torch_functional as verl_F
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.model import compute_position_id_with_mask


class TaggedDataset(RLHFDataset):
    """Adds a column to every row."""

    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["difficulty"] = item % 3
        return row


class EvenRows(RLHFDataset):
    """Reads and filters the files with the ``datasets`` library."""

    def _read_files_and_tokenize(self):
        frames = [datasets.load_dataset("parquet", data_files=path)["train"] for path in self.data_files]
        self.dataframe = datasets.concatenate_datasets(frames)
        self.dataframe = self.dataframe.filter(lambda row: row["extra_info"]["index"] % 2 == 0)


class FromScratch(Dataset):
    """Makes its questions itself; hears about every finished batch."""

    def __init__(self, data_files, tokenizer, config, processor=None):
        if not isinstance(data_files, list | ListConfig):
            data_files = [data_files]
        self.tokenizer = tokenizer
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.truncation = config.get("truncation", "error")
        self.rewards = []

    def __len__(self):
        return 12

    def on_batch_end(self, batch):
        self.rewards.append(batch.batch["token_level_rewards"].sum().item())

    def __getitem__(self, i):
        chat = [{"role": "user", "content": f"What is {i} plus {i}?"}]
        raw_prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        encoded = self.tokenizer(raw_prompt, return_tensors="pt", add_special_tokens=False)
        input_ids, attention_mask = verl_F.postprocess_data(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_length=self.max_prompt_length,
            pad_token_id=self.tokenizer.pad_token_id,
            left_pad=True,
            truncation=self.truncation,
        )
        return {
            "input_ids": input_ids[0],
            "attention_mask": attention_mask[0],
            "position_ids": compute_position_id_with_mask(attention_mask)[0],
            "raw_prompt_ids": self.tokenizer.encode(raw_prompt, add_special_tokens=False),
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "index": i,
        }
