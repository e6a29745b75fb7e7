// Scores tensors by a package of `rowwise export RUN clicks.pt2 --pt2`, in a process without Python.
//
//     TORCH=$(python -c 'import torch; print(torch.__path__[0])')
//     c++ -std=c++20 -O2 score.cpp -o score -I$TORCH/include -I$TORCH/include/torch/csrc/api/include
//         -L$TORCH/lib -Wl,-rpath,$TORCH/lib -ltorch -ltorch_cpu -lc10
//
//     score clicks.pt2                                 prints the names of inputs and outputs
//     score clicks.pt2 inputs.pt outputs.pt [calls]
//
// inputs.pt is a list of tensors that torch.save has written, in the order of the inputs; outputs.pt is the
// tuple of the model's outputs, for torch.load. With a number of calls it times them, and prints microseconds of one.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

static std::vector<at::Tensor> read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const c10::IValue list = torch::pickle_load(bytes);
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : list.toListRef()) tensors.push_back(value.toTensor());
  return tensors;
}

int main(int count, char** words) {
  if (count != 2 && count != 4 && count != 5) {
    std::cerr << "score PACKAGE [INPUTS OUTPUTS [CALLS]]\n";
    return 2;
  }
  c10::InferenceMode without_gradients;
  at::set_num_threads(1);
  try {
    torch::inductor::AOTIModelPackageLoader model(words[1], "model", /*run_single_threaded=*/true);
    if (count == 2) {
      auto about = model.get_metadata();
      std::cout << about["inputs"] << "\n" << about["outputs"] << "\n";
      return 0;
    }
    const std::vector<at::Tensor> inputs = read(words[2]);
    const std::vector<at::Tensor> outputs = model.run(inputs);
    const std::vector<c10::IValue> values(outputs.begin(), outputs.end());
    const std::vector<char> bytes = torch::pickle_save(c10::ivalue::Tuple::create(values));
    std::ofstream(words[3], std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
    if (const int calls = count > 4 ? std::stoi(words[4]) : 0) {
      const auto begin = std::chrono::steady_clock::now();
      for (int call = 0; call < calls; ++call) model.run(inputs);
      const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
      std::cout << took.count() / calls << " us\n";
    }
  } catch (const std::exception& error) {  // such as an id that its table does not have
    std::cerr << std::string(error.what()).substr(0, std::string(error.what()).find('\n')) << "\n";
    return 1;
  }
}
