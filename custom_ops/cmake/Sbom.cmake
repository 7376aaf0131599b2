# nnorm_export.cdx.json: the software bill of materials (CycloneDX 1.6) of the compiled libraries. The wheel has it in the
# folder .dist-info/sboms (PEP 770), where scanners look. A wheel without libraries has none: it contains no code of others.
#
# It lists the libraries, and what compilers and headers put into some of them or all: the descriptions say where.
# THIRD_PARTY.md has the same in words. It has neither a time nor hashes: the wheel's RECORD has those of the installed libraries, which differ from the built ones by `strip`.

# Appends a component to the variable `components`, and its name to `refs`.
#   nnorm_sbom_component(name version license what): `license` is an SPDX expression, or text of another licence.
function(nnorm_sbom_component name version license what)
  set(version_entry "")
  if(NOT "${version}" STREQUAL "")
    set(version_entry ", \"version\": \"${version}\"")
  endif()
  set(license_entry "{\"license\": {\"name\": \"${license}\"}}")
  if(license MATCHES "^(MIT|[A-Za-z]+-[0-9.]+(-or-later)? WITH .*)$")
    set(license_entry "{\"expression\": \"${license}\"}")
  endif()
  set(components "${components},
    {\"type\": \"library\", \"bom-ref\": \"${name}\", \"name\": \"${name}\"${version_entry},
     \"description\": \"${what}\", \"licenses\": [${license_entry}]}" PARENT_SCOPE)
  set(refs "${refs}, \"${name}\"" PARENT_SCOPE)
endfunction()

file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/../nnorm_export/_version.py" line REGEX "^__version__" LIMIT_COUNT 1)
string(REGEX MATCH "[0-9][^\"]*" version "${line}")

set(components "")
set(refs "")
nnorm_header_api("${NNORM_ONNXRUNTIME_HEADERS}" api)
nnorm_sbom_component("ONNX Runtime C API" "1.${api}" "MIT" "declarations of its C header, in nnorm_ort")
if(DEFINED NNORM_ZIG)
  foreach(name "libc++" "libc++abi" "libunwind")
    nnorm_sbom_component("LLVM ${name}" "${CMAKE_CXX_COMPILER_VERSION}" "Apache-2.0 WITH LLVM-exception"
      "linked statically by Zig")
  endforeach()
elseif(NNORM_CAN_LINK_CXX_STATICALLY AND NOT NNORM_SANITIZE)
  set(of_compiler "")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(of_compiler "${CMAKE_CXX_COMPILER_VERSION}")
  endif()
  foreach(name "libstdc++" "libgcc")
    nnorm_sbom_component("GNU ${name}" "${of_compiler}" "GPL-3.0-or-later WITH GCC-exception-3.1"
      "linked statically by the compiler")
  endforeach()
endif()
if(TARGET nnorm_cuda_kernels)
  nnorm_sbom_component("NVIDIA CUDA Runtime" "${CMAKE_CUDA_COMPILER_VERSION}" "CUDA Toolkit End User License Agreement"
    "linked statically into nnorm_ort_cuda and the plugins for TensorRT")
endif()
if(TARGET nnorm_trt)
  nnorm_sbom_component("TensorRT API" "${NNORM_TENSORRT_MAJOR}" "NVIDIA TensorRT Software License Agreement"
    "declarations of its headers, in the plugins for TensorRT")
endif()

set(libraries "")
set(comma "")
get_property(targets GLOBAL PROPERTY NNORM_LIBRARIES)
foreach(target IN LISTS targets)
  set(name "nnorm_export/lib/$<TARGET_FILE_NAME:${target}>")
  string(APPEND libraries "${comma}\n    {\"type\": \"file\", \"bom-ref\": \"${name}\", \"name\": \"${name}\"}")
  string(APPEND refs ", \"${name}\"")
  set(comma ",")
endforeach()
string(SUBSTRING "${refs}" 2 -1 refs)

set(output "${CMAKE_CURRENT_BINARY_DIR}/nnorm_export.cdx.json")
file(GENERATE OUTPUT "${output}" CONTENT "{
  \"$schema\": \"http://cyclonedx.org/schema/bom-1.6.schema.json\",
  \"bomFormat\": \"CycloneDX\",
  \"specVersion\": \"1.6\",
  \"version\": 1,
  \"metadata\": {\"component\": {
    \"type\": \"library\", \"bom-ref\": \"nnorm_export\", \"name\": \"nnorm_export\", \"version\": \"${version}\",
    \"purl\": \"pkg:pypi/nnorm-export@${version}\", \"licenses\": [{\"expression\": \"Apache-2.0\"}]}},
  \"components\": [${libraries}${components}
  ],
  \"dependencies\": [
    {\"ref\": \"nnorm_export\", \"dependsOn\": [${refs}]}
  ]
}
")
if(DEFINED SKBUILD_METADATA_DIR)
  install(FILES "${output}" DESTINATION "${SKBUILD_METADATA_DIR}/sboms" COMPONENT python)
endif()
