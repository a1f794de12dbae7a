import pytest
import torch
import transformers

from pinscher.models.dropout import set_dropout_

SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS = {
    "bert": (transformers.BertConfig, transformers.BertModel, SMALL),
    "bart": (
        transformers.BartConfig,
        transformers.BartModel,
        {"vocab_size": 50, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 1}
        | {"decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "attention_dropout": 0.1},
    ),
    "llama": (transformers.LlamaConfig, transformers.LlamaModel, SMALL | {"attention_dropout": 0.3}),
    "gpt2": (
        transformers.GPT2Config,
        transformers.GPT2Model,
        {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_without_dropout_a_model_in_training_says_what_it_says_in_evaluation(kind):
    config, model_class, sizes = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config(**sizes)).train()
    ids = torch.randint(3, 50, (2, 12))

    def said():
        return model(input_ids=ids).last_hidden_state

    assert not torch.equal(said(), said())
    before = model.config.to_dict()
    set_dropout_(model, 0.0)
    with torch.no_grad():
        in_training = said()
        model.eval()
        torch.testing.assert_close(in_training, said())
    assert model.config.to_dict() == before
