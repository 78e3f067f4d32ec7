// Runs what package.py has made, without Python: a verification, or a whole decoding loop.
//
//     aot_verify verify verify.pt2 verify_inputs.pt
//     aot_verify decode step.pt2 step_inputs.pt
//
// A file of inputs is a list of tensors written by torch.save, in the order of the module's arguments. What is printed
// is a row of tokens for each sequence: those that the verification emits, or the prompt and all that follows it.

#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

using at::Tensor;
using torch::inductor::AOTIModelPackageLoader;

// Places in the step's arguments (DecoderStep.forward).
constexpr size_t TOKENS = 0, LENGTHS = 1, FINISHED = 4, FAILED = 5;

std::vector<Tensor> read_tensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue list = torch::jit::pickle_load(bytes);
  std::vector<Tensor> tensors;
  for (const c10::IValue& value : list.toListRef()) tensors.push_back(value.toTensor());
  return tensors;
}

void print_rows(const Tensor& tokens, const Tensor& lengths) {
  for (int64_t row = 0; row < tokens.size(0); ++row) {
    const int64_t length = lengths[row].item<int64_t>();
    for (int64_t i = 0; i < length; ++i) std::cout << (i ? " " : "") << tokens[row][i].item<int64_t>();
    std::cout << "\n";
  }
}

void verify(AOTIModelPackageLoader& package, const std::vector<Tensor>& inputs) {
  const std::vector<Tensor> outputs = package.run(inputs);
  const Tensor &output_tokens = outputs.at(0), &num_accepted = outputs.at(1);
  // The accepted drafts and the next token, which is -1 only for a row without a distribution.
  print_rows(output_tokens, num_accepted + 1);
}

void decode(AOTIModelPackageLoader& package, std::vector<Tensor> state) {
  const Tensor lengths = state.at(LENGTHS).clone();
  // Finished rows emit nothing and read their newest token: so the prompts are read, one token at a time.
  state.at(FINISHED).fill_(true);
  for (int64_t read = 1; read <= lengths.max().item<int64_t>(); ++read) {
    state[LENGTHS].copy_(lengths.clamp_max(read));
    package.run(state);
  }
  state[FINISHED].fill_(false);
  int64_t num_steps = 0;
  for (; !state[FINISHED].all().item<bool>(); ++num_steps) package.run(state);
  if (state.at(FAILED).any().item<bool>()) std::cerr << "a row ended because the target gave no finite logit\n";
  print_rows(state[TOKENS], state[LENGTHS]);
  std::cerr << num_steps << " steps\n";
}

int main(int argc, char** argv) {
  const std::string command = argc == 4 ? argv[1] : "";
  if (command != "verify" && command != "decode") {
    std::cerr << "usage: " << argv[0] << " verify|decode PACKAGE INPUTS\n";
    return 2;
  }
  try {
    AOTIModelPackageLoader package(argv[2]);
    const std::vector<Tensor> inputs = read_tensors(argv[3]);
    command == "verify" ? verify(package, inputs) : decode(package, inputs);
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    std::cerr << argv[2] << ": " << message << "\n";
    if (message.find("specops::filter_bounds") != std::string::npos) {
      std::cerr << "On a CPU top_k, top_p and min_p need torch_specops, a Python package. Export without them, and "
                   "mask the logits with -inf in plain torch first.\n";
    }
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
